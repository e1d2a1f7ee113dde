"""From a configuration to compiled models: proved, measured, and on slots of this process."""
