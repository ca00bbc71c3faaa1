from demo.app import app

app()
