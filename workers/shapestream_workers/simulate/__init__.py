"""`shapestream simulate`: how a server would do, without one."""
