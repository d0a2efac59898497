"""Results in one form, and what is made of them: tables, one document, a verdict."""
