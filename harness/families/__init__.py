"""Which model families are measured rightly: each one is built tiny and tried against transformers itself."""
