"""Training of networks from volumes: samples that stream, and the sets that they belong to.

Nothing here knows Beam. What is trained is run over volumes by a job, as any other network.
"""
