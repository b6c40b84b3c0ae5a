def write_page(stored, docs):
    pass
