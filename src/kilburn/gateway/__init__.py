"""The HTTP door: any agent gets the hierarchy by changing its base URL (extra `serve`)."""
