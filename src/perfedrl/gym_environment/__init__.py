"""One Gymnasium environment: how it is made, opened and asked. Nothing here imports JAX, so its processes are small."""
