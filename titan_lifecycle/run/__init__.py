"""From a job file to running ranks."""
