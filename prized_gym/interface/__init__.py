"""What engines and everything above them are written against."""
