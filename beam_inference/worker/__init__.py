"""What one worker process does to chunks: read, infer, blend, write, and keep receipts."""
