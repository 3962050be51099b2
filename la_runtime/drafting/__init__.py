"""Where drafts come from, and the tree that is made of them."""
