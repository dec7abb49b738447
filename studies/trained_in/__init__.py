"""What designs that save cache bytes by training cost in recall: tiny models of each, trained here, measured by the harness."""
