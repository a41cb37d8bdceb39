"""What the gateway knows of engines: one Protocol and its implementations."""
