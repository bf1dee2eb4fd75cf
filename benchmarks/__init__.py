"""What `benchmark.py` measures with: a file of tables for every page in benchmarks/pages, and what they share."""
