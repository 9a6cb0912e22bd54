"""Real federations: the round loop of this house at a coordinator, the data at sites that never
give them away, and Flower to carry what travels.

    wire, cargo   what a message looks like: a short JSON text and a few flat arrays; trees of
    tensors as such arrays carrier       Flower's grid as four plain verbs: the only file at the
    coordinator that knows Flower's messages roster        which sites are there, and which clients
    live where session       whom to ask, how long to wait, and what becomes of work that gets lost
    engine        the engine `flower`: asks sites to train and to count coordinator   an experiment
    on a federation: start, or go on where it stopped; described: without any data of its own
    server_app    the coordinator's end of a Flower app settings      site.toml: what a site holds,
    allows and keeps holdings      a site's own data as a task for an inner engine site          a
    site's answers; policy: what it refuses, suppresses and noises; secrecy: noise that nobody can
    know memory        what a site keeps on its own disk worker        a site's process that stays
    between messages; worker_client: how it is reached and started client_app    a site's end of a
    Flower app: a new process for every message, which imports nothing heavy

`certificates`, `processes`, `app_files`, `inspection` and `quickstart` are behind the commands of
`remanence flower`. docs/flower.md is the way in.
"""
