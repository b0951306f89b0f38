from hf_specgen.commands.demo import main

if __name__ == "__main__":
    main()
