from hf_specgen.commands.generate import main

if __name__ == "__main__":
    main()
