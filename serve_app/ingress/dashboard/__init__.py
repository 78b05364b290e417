"""`/dashboard`: a page for people. The page itself is in static/ and is served as it lies there."""
