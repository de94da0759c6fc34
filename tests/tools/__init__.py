"""What several tests use: processes and how to wait for them, sandboxes, the server's client, comparing, libraries."""
