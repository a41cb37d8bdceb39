"""The three protocols: rendering requests, observing replies."""
