"""One module or folder per engine, and the only place that imports it; `compile_model` chooses among them."""
