"""What every operator promises, on every backend: cases, a float64 oracle and one judge."""
