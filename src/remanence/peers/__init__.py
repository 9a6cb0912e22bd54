"""Peers, where there is no server.

    topology        which clients can reach each other
    availability    which clients are online in a round
    peer_sampling   drawing peers for all clients at once
    similarity      estimated similarity between clients

This package imports core alone.
"""
