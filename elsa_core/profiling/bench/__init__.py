"""What `elsa bench` measures: cases, peers, timing, results and their tables and plots."""
