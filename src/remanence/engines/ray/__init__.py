"""The engine over Ray.

`engine` is the engine, `connection` the cluster, `pool` the actors and `worker` what one does.
`work_parts` divides the work, `partial_sums` and `model_store` keep models in the cluster,
`serialization` packs what is sent, and `checks` rejects what cannot run before a cluster is needed.

May import what `engines` may. Ray itself is imported inside functions only.
"""
