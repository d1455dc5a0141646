"""A job and what is known of it: resolved job, state folder, receipts, status, verification."""
