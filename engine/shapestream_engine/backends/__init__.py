"""One module or folder per engine. No other code imports an engine; `compile_model` chooses among them."""
