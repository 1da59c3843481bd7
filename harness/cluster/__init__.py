"""Work on many machines by Ray, which is imported in this package only: batch jobs, suites, and nodes in SLURM jobs."""
