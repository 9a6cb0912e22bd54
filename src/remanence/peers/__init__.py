"""Whom a client listens to where there is no server: who can reach whom, who answers, how peers
are drawn, how alike they seem.
"""
