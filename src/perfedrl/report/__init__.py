"""Pictures and tables of saved runs. Nothing here simulates."""
