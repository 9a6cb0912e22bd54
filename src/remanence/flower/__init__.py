"""Real federations: a coordinator runs the rounds, sites keep their data, Flower sends messages.

    coordinator                                       site
    server_app                                        site_files   site_storage
        |                                                  |            |
    coordinator -> rounds.loop                        site_data -> site, site_work, policy
                       |                                                |
                   engine, remote_scoring                          site_daemon
                       |                                                | socket
                   session -> node_registry -> transport <=Flower=> client_app, daemon_client

Both ends:
    wire               the message format: a JSON header and a few flat arrays
    array_codec        trees of tensors as the arrays of a message, and back
    settings           site.toml: the clients, policy and devices of a site
Coordinator:
    server_app         the Flower ServerApp
    coordinator        starts or resumes a run on the connected sites
    deployment         the coordinator's side of an experiment, and what sites receive of it
    data_description   describes examples where the coordinator has no data
    engine             the engine `flower`: sends training work, yields the replies
    remote_scoring     requests counts of correct predictions from sites
    work_header        the header of a message with work for clients
    session            sends requests, waits for responses, repeats lost ones
    node_registry      which sites are connected, and which clients each of them has
    transport          Flower's grid behind four methods; the only file that uses its messages
Site:
    client_app         the Flower ClientApp; a new process per message, imports nothing heavy
    daemon_client      connects to the site's daemon and starts it
    site_daemon        a process that keeps torch and the data in memory between messages
    site               handles each kind of message, and makes all that a site sends
    experiment_check   checks that an experiment names no file and no code
    refusals           what leaves the site in place of an answer
    site_work          turns a message into work for the site's clients
    site_data          the site's own data as a task for a local engine
    site_files         reads the data that site.toml names
    site_storage       client states and replies on the site's disk
    policy             what the site declines, what it withholds, and noise on counts
    discrete_noise     that noise, drawn exactly
    budget             the epsilon of the counts about each client, for all runs
    budget_file        the file of the budget
    secure_noise       noise that does not follow from the experiment's seed
Commands of `remanence flower`: certificates, processes, app_files, preflight, quickstart, audit,
with the messages of sample_requests.

The package may import everything below the front ends. Only `transport`, `server_app` and
`client_app` import Flower. To read the code, begin with `coordinator` and `site`. The guide for
users is docs/flower.md.
"""
