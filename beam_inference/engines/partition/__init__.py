"""One patch divided over several processes, with halos exchanged between them."""
