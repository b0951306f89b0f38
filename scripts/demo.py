from hf_specgen.commands.runner import run

if __name__ == "__main__":
    run("demo")
