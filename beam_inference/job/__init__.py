"""What a job is, and what is known of it: the resolved job, its state folder, receipts, status, verification."""
