"""Models and data sets of the Hugging Face hub: downloaded at pinned commits, then used offline."""
