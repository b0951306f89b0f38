from hf_specgen.commands.profile import main

if __name__ == "__main__":
    main()
