"""A blob detector over photographs of many sizes: outputs whose shape depends on the content."""
