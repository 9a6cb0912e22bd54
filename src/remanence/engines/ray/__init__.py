"""The engine over Ray: the engine, its connection, pool and workers, models that stay where they were trained, and what travels."""
