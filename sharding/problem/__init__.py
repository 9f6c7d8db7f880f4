"""What is to be planned: tables, the job, the options of each table, and what shards cost."""
