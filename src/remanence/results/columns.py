"""The columns of metrics.jsonl: one line for each round, split and kind of model.

`rounds/federated.py`, `rounds/decentralized.py` and the evaluators compute them, `rounds/writer.py`
writes them, and `readers.py` checks them. Columns that do not apply to a run are left out. The
columns of `results.csv` are the fields of `MethodRow` (`metrics/summary_rows.py`); the headings of
a report's tables are in `report/table_columns.py`.
"""

from __future__ import annotations

# columns that hold one number, or null where it is unknown
NUMBERS = {
    # written by the evaluators
    "time_step": "time step of the round, from 0",
    "accuracy": "share of correct predictions; null where the round is not evaluated",
    "loss": "mean cross-entropy",
    "macro_f1": "mean F1 over the classes that the examples have",
    "worst_client": "lowest accuracy of a client's own model",
    "bottom_decile": "mean accuracy of the tenth of clients with the lowest one",
    "spread": "standard deviation of the accuracies of the clients' own models",
    "attack_success": "share of test examples on which an attack succeeds",
    # written by the rounds
    "train_loss": "mean of the used replies' finite losses in the last phase of local training",
    "replies": "valid replies on time, and late ones that arrived; used unless abandoned",
    "seconds": "duration of the round without its final evaluation",
    "bytes_up": "bytes that the round's clients send, used or not, late ones included",
    "bytes_down": "bytes from the server to clients, or between clients",
    "global_models": "number of global models, for methods with several",
    "invited": "clients that were asked to train, where replies can be late",
    "late": "valid replies after the deadline, or after enough others",
    "stale_used": "late replies of earlier rounds among those used in this one; 0 if abandoned",
    "simulated_seconds": "simulated duration of the round, where replies can be late",
    "unmoved": "clients whose valid reply has exactly the parameters that they received",
    "valid_accuracy": "mean validation accuracy of the clients' current models, without a server",
    "offline": "clients that were not online, without a server",
    "early_stopped": "clients that have stopped training, without a server",
    "same_cluster_share": "share of the peers' models that came from the client's own cluster",
    "epsilon": "privacy spent so far, of clients, for adding or removing one",
    "epsilon_replace": "the same for replacing one",
    "epsilon_example": "privacy spent so far, of examples, for adding or removing one",
    "epsilon_example_replace": "the same for replacing one",
    "epsilon_label_counts": "privacy spent so far, of label counts, for adding or removing one",
    "epsilon_label_counts_replace": "the same for replacing one",
}
# shares, which are 0 to 1; the other numbers are 0 or more
SHARES = {
    "accuracy",
    "macro_f1",
    "worst_client",
    "bottom_decile",
    "spread",
    "attack_success",
    "same_cluster_share",
    "valid_accuracy",
}
SIGNED = {"train_loss"}  # a method may add a term below 0
# the other columns
OTHERS = {
    "round": "from 1",
    "model": "global, or personal where clients have models of their own",
    "split": "test or valid",
    "per_class": "accuracy of each class; null for a class without examples",
    "rejected": "client, code and reason where a reply was rejected or a client declined",
    "no_response": "clients that did not reply",
    "payload": "mean of each number that clients send besides their models",
    "abandoned": "true where too few replies arrived or no aggregation succeeded",
    "learned": "false where no client and no server training changed a model by its examples",
    "problem": "why a global model was not updated although enough replies arrived",
}
COLUMNS = NUMBERS | OTHERS
