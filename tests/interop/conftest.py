def pytest_configure(config):
    config.addinivalue_line("markers", "long: a mark of tokamax's tests")
