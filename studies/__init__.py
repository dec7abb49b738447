"""Long computations outside the tests, which use the harness as anybody would."""
