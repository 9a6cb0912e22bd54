"""The round loop: what happens from one checkpoint to the next.

Read `loop.py` first, which starts, resumes and trains a run, then read the round it repeats:
`federated.py` with a server, `decentralized.py` without one. A round reads from top to bottom:

    sample     client_sampling    which clients are online, and which of them train
    broadcast  federated          what each of them starts from
    train      replies            the engine trains, the gate rejects bad replies
    wait       stragglers         replies that are late, used or discarded
    aggregate  federated          the server's update, of several global models too (clustered)
               peer_averaging     without a server: choose peers and average with them
               early_stopping     without a server: a client stops when its model gets no better
    evaluate   evaluator          counts of global, local and personal models (personalization)
               peer_evaluator     counts of the clients' models
               attack_success     how often attacks succeed
               records            what an evaluation returns and the writer stores
    check      round_checks       names what goes wrong in training
    write      writer             metrics.jsonl, the ledger and the other files of the run folder

`setup.py` chooses the kind of round and makes the state before the first one, `engine_choice.py`
chooses the engine. `privacy_budget.py` computes the guarantees of a run, `time_limit.py` limits its
time. The default aggregation is in `training/server_step.py` and `aggregators/mean.py`; the
columns of metrics.jsonl are listed in `results/columns.py`. May import results, experiment, engines
and everything below.
"""
