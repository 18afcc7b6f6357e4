"""What users read: jobs in lines, and what to do about them."""
