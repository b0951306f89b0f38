from hf_specgen.commands.benchmark.benchmark import main

if __name__ == "__main__":
    main()
