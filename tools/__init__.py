"""What maintains the repository; nothing here is installed."""
