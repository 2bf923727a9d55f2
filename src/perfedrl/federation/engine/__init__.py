"""Where NVFlare is: everything that knows of the engine is in this folder, the rest of `federation` does not."""
