"""The engine over Ray.

`engine` is the engine, `connection` the cluster, `pool` the actors and `worker` what one does.
`work_parts` divides the work, `partial_sums` and `model_store` keep models in the cluster,
`serialization` packs what travels, and `checks` finds what cannot run before a cluster is needed.
"""
