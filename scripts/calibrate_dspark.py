from hf_specgen.commands.calibrate import main

if __name__ == "__main__":
    main()
