"""Workers as actors of Ray, which dial in to one server with one queue."""
