"""From a configuration to objects: data, model, method, task, and the system the clients live in."""
