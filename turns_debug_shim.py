import sys,os
sys.path.insert(0,"/tmp")
def more():
    if "CYCLES" in os.environ:
        import cycles
    if "HEAP_DEBUG" in os.environ:
        import heap_debug
    if "TURNS_DEBUG" in os.environ:
        import turns_debug
        return [turns_debug.T(os.environ["TURNS_DEBUG"])]
    return []
