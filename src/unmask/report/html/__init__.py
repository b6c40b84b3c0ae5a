"""The report as one HTML page that works offline."""
