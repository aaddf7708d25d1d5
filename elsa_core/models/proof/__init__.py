"""What `check` stands on: inputs, runs side by side, the criterion, the report."""
