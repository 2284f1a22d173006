"""The page: what pools do, live in a browser, and as metrics for other programs."""
